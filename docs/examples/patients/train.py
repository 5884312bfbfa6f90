import lockstep

if __name__ == "__main__":
    lockstep.main(extensions=["patients"])
