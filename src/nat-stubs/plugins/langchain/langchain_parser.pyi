from insitu.toolkit.parsers.langchain_parser import *
