"""One module a format: a file becomes an ``Index``. No bulk reads, no MPI, no TensorFlow here."""

if __name__ != "matex_data.readers":
    raise ImportError("import this package as matex_data.readers: two copies of a class would be two classes")
