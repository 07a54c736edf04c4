"""The op pack of torch's aten and prims namespaces: pure JAX functions, one family a file. Found through pack.py."""
