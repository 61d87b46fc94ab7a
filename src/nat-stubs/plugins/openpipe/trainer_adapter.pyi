from insitu.adapters.art.trainer_adapter import *
