from insitu.adapters.customizer.components import *
