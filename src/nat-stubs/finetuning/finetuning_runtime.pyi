from insitu.training.runtime import *
