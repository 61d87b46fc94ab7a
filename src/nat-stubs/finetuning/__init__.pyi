from insitu.interfaces import *
