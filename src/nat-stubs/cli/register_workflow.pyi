from insitu.registry.components import *
