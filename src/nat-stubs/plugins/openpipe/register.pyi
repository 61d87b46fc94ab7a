from insitu.adapters.art.components import *
