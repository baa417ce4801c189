PART = __name__
