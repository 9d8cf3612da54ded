"""A job that is struck every few seconds for an hour, on a small disk and with few descriptors: what grows?"""
