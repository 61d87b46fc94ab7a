from insitu.integrations.customizer.config import *
