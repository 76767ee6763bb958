//! Lists of device operations.

use super::{CommError, DeviceBatch, sealed::Enqueue};

impl<O: Enqueue> Enqueue for Vec<O> {
    const HAS_BARRIER: bool = O::HAS_BARRIER;

    fn add<'a>(self, batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
    where
        Self: 'a,
    {
        self.into_iter().try_for_each(|operation| operation.add(batch))
    }
}

impl<O: Enqueue, const N: usize> Enqueue for [O; N] {
    const HAS_BARRIER: bool = O::HAS_BARRIER;

    fn add<'a>(self, batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
    where
        Self: 'a,
    {
        self.into_iter().try_for_each(|operation| operation.add(batch))
    }
}

macro_rules! tuples {
    ($(($($Operation:ident $operation:ident),*);)*) => {$(
        impl<$($Operation: Enqueue),*> Enqueue for ($($Operation,)*) {
            const HAS_BARRIER: bool = false $(|| $Operation::HAS_BARRIER)*;

            fn add<'a>(self, batch: &mut DeviceBatch<'a>) -> Result<(), CommError>
            where
                Self: 'a,
            {
                let ($($operation,)*) = self;
                $($operation.add(batch)?;)*
                Ok(())
            }
        }
    )*};
}

tuples! {
    (A a, B b);
    (A a, B b, C c);
    (A a, B b, C c, D d);
    (A a, B b, C c, D d, E e);
    (A a, B b, C c, D d, E e, F f);
}
