"""A session with batches that are fed, in a graph of its own."""

import sys

import numpy as np
import tensorflow as tf

rng = np.random.RandomState(15)
x_data = rng.normal(size=(90, 4)).astype("float32")
y_data = (x_data[:, :1] * x_data[:, 1:2]).astype("float32")
v1 = tf.compat.v1
with tf.Graph().as_default():
    v1.set_random_seed(15)
    x, y = v1.placeholder(tf.float32, [None, 4]), v1.placeholder(tf.float32, [None, 1])
    rate = v1.placeholder(tf.float32, [])
    w1 = v1.get_variable("w1", initializer=tf.constant(rng.normal(0, 0.4, (4, 8)).astype("float32")))
    w2 = v1.get_variable("w2", initializer=tf.constant(rng.normal(0, 0.4, (8, 1)).astype("float32")))
    loss = tf.reduce_sum(tf.square(tf.matmul(tf.nn.tanh(tf.matmul(x, w1)), w2) - y)) / 25
    train = v1.train.AdamOptimizer(rate).minimize(loss)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for epoch in range(3):
            for start in range(0, 90, 25):
                feed = {x: x_data[start : start + 25], y: y_data[start : start + 25], rate: 0.05 / (epoch + 1)}
                value, _ = session.run([loss, train], feed_dict=feed)
            print(f"RESULT loss {epoch} {value:.6f}")
        arrays = session.run([w1, w2])
np.savez(sys.argv[1] + ".npz", *arrays)
