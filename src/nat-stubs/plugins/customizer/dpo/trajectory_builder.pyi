from insitu.trajectories.preferences import *
