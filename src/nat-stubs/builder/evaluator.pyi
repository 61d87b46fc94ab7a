from insitu.registry.kinds import *
