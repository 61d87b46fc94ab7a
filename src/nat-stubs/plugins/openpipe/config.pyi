from insitu.adapters.art.config import *
