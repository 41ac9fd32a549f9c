# ruff: noqa: B905
"""TensorFlow 1 as it was written: placeholders, a session, and batches that are fed."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
tf.set_random_seed(1)
rng = np.random.RandomState(0)
x_data = rng.normal(size=(330, 6)).astype("float32")
y_data = (x_data[:, :1] ** 2).astype("float32")

x = tf.placeholder(tf.float32, [None, 6])
y = tf.placeholder(tf.float32, [None, 1])
w1 = tf.Variable(tf.random_normal([6, 12], stddev=0.3))
b1 = tf.Variable(tf.zeros([12]))
w2 = tf.Variable(tf.random_normal([12, 1], stddev=0.3))
prediction = tf.matmul(tf.nn.tanh(tf.matmul(x, w1) + b1), w2)
loss = tf.reduce_mean(tf.square(prediction - y))
optimizer = tf.train.MomentumOptimizer(0.05, 0.9)
gradients, variables = zip(*optimizer.compute_gradients(loss))
clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
train = optimizer.apply_gradients(zip(clipped, variables))
few, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.1)
other = tf.train.GradientDescentOptimizer(0.1).apply_gradients(zip(few, variables))

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        for start in range(0, 330, 50):
            batch = {x: x_data[start : start + 50], y: y_data[start : start + 50]}
            session.run([train, loss], feed_dict=batch)
            session.run(other, feed_dict=batch)
    print(f"RESULT {session.run(loss, {x: x_data, y: y_data}):.6f}")
    values = session.run([w1, b1, w2])
np.savez(sys.argv[1] + ".npz", *values)
