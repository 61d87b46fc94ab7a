from insitu.integrations.nat.base_parser import *
