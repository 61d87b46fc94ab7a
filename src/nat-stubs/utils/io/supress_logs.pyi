from insitu.training.logs import *
