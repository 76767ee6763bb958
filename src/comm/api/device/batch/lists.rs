//! Lists of device operations.

use super::{DeviceBatch, Enqueue};
use crate::error::CommError;

device_operations! {
    [O: Enqueue] Vec<O>, HAS_BARRIER = O::HAS_BARRIER, |list, batch| {
        batch.reserve(list.len());
        list.into_iter().try_for_each(|operation| operation.add(batch))?;
    }

    [O: Enqueue, const N: usize] [O; N], HAS_BARRIER = O::HAS_BARRIER, |list, batch| {
        batch.reserve(N);
        list.into_iter().try_for_each(|operation| operation.add(batch))?;
    }
}

macro_rules! tuples {
    ($(($($Operation:ident $operation:ident),*);)*) => {
        device_operations! {$(
            [$($Operation: Enqueue),*] ($($Operation,)*), HAS_BARRIER = false $(|| $Operation::HAS_BARRIER)*, |list, batch| {
                let ($($operation,)*) = list;
                $($operation.add(batch)?;)*
            }
        )*}
    };
}

tuples! {
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
    (A a, B b, C c, D d, E e);
    (A a, B b, C c, D d, E e, F f);
}
