from insitu.integrations.nat.ttc import *
