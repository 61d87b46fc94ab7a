from insitu.trajectories.parsers.langchain_parser import *
