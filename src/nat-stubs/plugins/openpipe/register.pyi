from insitu.adapters.art.register import *
