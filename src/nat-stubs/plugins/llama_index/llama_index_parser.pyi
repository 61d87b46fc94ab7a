from insitu.toolkit.parsers.llama_index_parser import *
