"""TensorFlow 1 throughout: no eager execution, tf.data, one of its optimizers, and a loss of the batch."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
rng = np.random.RandomState(16)
x_data = rng.normal(size=(80, 4)).astype("float32")
y_data = np.abs(x_data[:, :1])
x, y = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None, 1])
w = tf.Variable(rng.normal(0, 0.4, (4, 6)).astype("float32"))
v = tf.Variable(rng.normal(0, 0.4, (6, 1)).astype("float32"))
loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.relu(tf.matmul(x, w)), v) - y))
optimizer = tf.train.GradientDescentOptimizer(0.1)
gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
clipped, norm = tf.clip_by_global_norm(gradients, 0.5)
train = optimizer.apply_gradients(zip(clipped, variables, strict=True))
with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for step in range(9):
        rows = rng.permutation(80)[: 20 + step]
        _, value, size = sess.run([train, loss, norm], feed_dict={x: x_data[rows], y: y_data[rows]})
        print(f"RESULT step {step} {value:.6f} {size:.6f}")
    arrays = sess.run([w, v])
np.savez(sys.argv[1] + ".npz", *arrays)
