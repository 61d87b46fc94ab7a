from insitu.collect.evaluators import *
