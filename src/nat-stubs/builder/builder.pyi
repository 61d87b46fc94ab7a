from insitu.builder import *
