//! Tests of the membership state machines: single scenarios, and many random ones in a simulated world.

mod agent;
mod faults;
mod offices;
mod random;
mod scale;
mod simulation;
mod stories;
mod world;
