from insitu.registry.builder import *
