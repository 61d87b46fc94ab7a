"""Small text functions, registered in the older entry point group."""
