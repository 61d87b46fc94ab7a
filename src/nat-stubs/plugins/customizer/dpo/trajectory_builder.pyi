from insitu.trajectories.dpo import *
