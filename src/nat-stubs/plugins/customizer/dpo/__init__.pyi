from insitu.integrations.customizer.components import *
