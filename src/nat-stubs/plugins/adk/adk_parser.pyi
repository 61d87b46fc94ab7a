from insitu.integrations.nat.adk_parser import *
