from insitu.trajectories.parsers.llama_index_parser import *
