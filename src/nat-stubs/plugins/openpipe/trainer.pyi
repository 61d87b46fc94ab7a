from insitu.adapters.art.trainer import *
