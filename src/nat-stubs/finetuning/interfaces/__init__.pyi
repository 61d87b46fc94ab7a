from insitu.training.interfaces import *
