from insitu.adapters.customizer.trainer import *
