from insitu.integrations.nat.llama_index_parser import *
