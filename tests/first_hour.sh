lockstep train dataset=folder dataset.path=photos dataset.decode_size=18 dataset.input_size=16 batch=32 epochs=5
lockstep evaluate latest
lockstep predict latest photos/val
lockstep export latest
lockstep demo latest --port 0
