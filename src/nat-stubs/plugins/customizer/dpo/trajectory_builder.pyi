from insitu.training.preference_builders import *
