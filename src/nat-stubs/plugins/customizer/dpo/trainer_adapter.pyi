from insitu.integrations.customizer.trainer_adapter import *
