import lockstep

if __name__ == "__main__":
    lockstep.main(extensions=["lr_segments"])
