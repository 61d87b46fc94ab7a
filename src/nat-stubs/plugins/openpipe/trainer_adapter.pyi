from insitu.integrations.art.trainer_adapter import *
