from insitu.toolkit.parsers.base_parser import *
