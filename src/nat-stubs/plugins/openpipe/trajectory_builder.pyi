from insitu.integrations.art.components import *
