from insitu.trajectories.parsers.base_parser import *
