# The function table (node_table of nodes.h) to read graphs with instead of the installed driver's; NULL: that one again.
cdef int use_nodes(const void *table) except -1
