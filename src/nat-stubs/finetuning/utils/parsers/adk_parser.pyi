from insitu.trajectories.parsers.adk_parser import *
