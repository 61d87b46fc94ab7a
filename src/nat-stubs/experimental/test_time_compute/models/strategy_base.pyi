from insitu.toolkit.ttc import *
