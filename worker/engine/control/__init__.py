"""ControlNets: networks beside the UNet, which steer it by an image of edges, depths or poses."""
