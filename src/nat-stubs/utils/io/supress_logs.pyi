from insitu.toolkit.logs import *
