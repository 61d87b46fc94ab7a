from insitu.adapters.art.trajectory_builder import *
