from insitu.integrations.customizer.trainer import *
