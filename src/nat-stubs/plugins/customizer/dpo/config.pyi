from insitu.adapters.customizer.config import *
