from insitu.adapters.customizer.trainer_adapter import *
